"""What every face that serves rows by Django REST framework shares: views, pages, fields."""
